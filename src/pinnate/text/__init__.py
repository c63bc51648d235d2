"""Text in and out: tokenizer, chat template, detokenizer, stop strings. Knows no engine and no HTTP."""
