"""The limits of structured outputs, all of them.

What a client may send is bounded before anything is compiled; what passes may still be dear, so compilation and every
step of a matcher are bounded too. A compile that goes beyond is refused (400); a step that does ends its request alone.
"""

from __future__ import annotations

# Of what the client sends.
MAX_BYTES = 512 * 1024  # of a schema, pattern, grammar or list of choices as text
MAX_REGEX_BYTES = 64 * 1024  # of a pattern, also of one inside a schema
MAX_DEPTH = 64  # of nested schemas; of groups in a pattern
MAX_NODES = 20_000  # schemas within a schema
MAX_CHOICES = 10_000
MAX_REGEX_SIZE = 20_000  # characters of a pattern once {n,m} is written out
MAX_TAGS = 256  # structures of a structural tag

# Of a compile, in the checking process.
COMPILE_SECONDS = 1.5
COMPILE_BYTES = 1 << 30  # of address space
MAX_COMPILES_WAITING = 64  # of live requests, and as many of background ones

# Of llguidance: fuel counts lexer work (about 50,000 a millisecond at the start, 14,000 in a step), items are Earley's.
INITIAL_LEXER_FUEL = 5_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 100_000
MAX_GRAMMAR_SIZE = 500_000
MAX_ITEMS_IN_ROW = 2_000

# Of the verdicts that the server remembers; the engine bounds its compiled grammars itself (engine/grammar_intake.py).
CACHED_GRAMMARS = 128
CACHED_GRAMMAR_BYTES = 16 << 20  # of their texts
