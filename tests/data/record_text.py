"""Records what other tokenizers say, for the tests of `pinnate.text`.

    python tests/data/record_text.py TOKENIZER_JSON TRAINING_TEXT

writes `smollm2_ids.json` (ids by the Hugging Face file of the default model's tokenizer) and `sentencepiece.json` (a
small SentencePiece BPE vocabulary trained on the text, and its ids). Needs `sentencepiece`, which pinnate does not
depend on.
"""

import io
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEXTS = [
    "",
    " ",
    "a",
    "1, 2, 3, 4, 5, 6, 7,",
    "10, 20, 30, 40, 50, 60,",
    "0 1 0 1 0 1 0 1 0 1 0 1",
    "The weather today is",
    "Here is the English alphabet: ABC",
    "ď ď ď ď ď ď ď ď",
    "😀",
    "Hello, world! It's 3.14159 o'clock; we're here, they'll come, I'd say I've 'em.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    '{"key": [1, 2.5e-3, null], "nested": {"a": "b\\n"}}',
    "for (int i = 0; i < 10; ++i) { x[i] += y[i] * 0xFF; }  // comment\r\n",
    "tabs\tand\t\ttabs\n\n\nnewlines\r\n\r\nand   runs    of     blanks      ",
    "   leading and trailing   ",
    "\u00a0no-break\u2003em space\u3000ideographic\u200bzero width",
    "汉字与日本語のテキスト、한국어 문장도 있습니다。",
    "Ünïcödé: café, naïve, Zürich, Łódź, Ærø, İstanbul, ﬁ ligature",
    "e\u0301 a\u030a n\u0303 q\u0323\u0307 combining",
    "👩‍👩‍👧‍👦 👍🏽 🇨🇿 ❤️ 🏳️‍🌈",
    "मानक हिन्दी และภาษาไทย مرحبا بالعالم שלום",
    "x²+y²=z² ½ Ⅷ ١٢٣ ๔๕ 12345678901234567890",
    "∑∫√∞≠≤≥±×÷ →⇒∀∃∈",
    "\x00\x01\x02\x1b[0m\x7f",
    "\ufeffBOM and \ufffd replacement and \uffff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more<|im_end|> <|im_end|>end",
    "<|im_start|><|im_start|>",
    "<|im_star|> <|not_special|> <repo_name>x<file_sep>",
    "a" * 300,
    "https://example.com/path?query=1&other=two#fragment user@example.org",
    "SHOUTING CamelCaseIdentifier snake_case_name kebab-case-name",
]
SENTENCEPIECE_TEXTS = [text for text in TEXTS if "\x00" not in text and "<|" not in text] + ["a  b", "aaaa", "\n\n"]
PIECES = [
    *"abcdeXYZ 019.,;\n\t",
    "the ",
    " and",
    "  ",
    "\n\n",
    "ď",
    "汉",
    "😀",
    "\u0301",
    "'s",
    "->",
    "<|im_end|>",
    "\u3000",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(count)]


def record_smollm2(tokenizer_json: Path) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    cases = [[text, backend.encode(text).ids] for text in [*TEXTS, *random_texts(150)]]
    write(HERE / "smollm2_ids.json", {"cases": cases})


def record_sentencepiece(training_text: Path) -> None:
    import sentencepiece

    lines = training_text.read_text(encoding="utf-8").splitlines() + TEXTS[4:24]
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=stream,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    write(
        HERE / "sentencepiece.json",
        {
            "tokens": [model.id_to_piece(i) for i in range(size)],
            "scores": [model.get_score(i) for i in range(size)],
            "types": kinds,
            "cases": [[text, model.encode(text), model.decode(model.encode(text))] for text in SENTENCEPIECE_TEXTS],
        },
    )


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_smollm2(Path(sys.argv[1]))
    record_sentencepiece(Path(sys.argv[2]))
