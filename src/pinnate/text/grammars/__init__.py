"""Languages of structured outputs: checked (check.py), written as llguidance's grammars (source.py), compiled and
followed token by token (backend.py). Limits are in limits.py."""
