"""Two small tasks of lm-eval through its `local-completions`: python evaluate.py BASE_URL MODEL FOLDER.

FOLDER is empty; the tasks and their data are written into it. Prints the results as JSON, on the last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "1, 2, 3, 4, 5, 6, 7,", "choices": [" 8", " 3"], "label": 0, "answer": " 8"},
    {"question": "10, 20, 30, 40, 50, 60,", "choices": [" 10", " 70"], "label": 1, "answer": " 70"},
    {"question": "0 1 0 1 0 1 0 1 0 1 0 1", "choices": [" 7", " 1"], "label": 1, "answer": " never"},
]
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOICE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_target": "{{label}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
GENERATE = {
    "task": "continue",
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [",", "\n"], "max_gen_toks": 8, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def write_tasks(folder: Path) -> None:
    data = folder / "questions.json"
    data.write_text(json.dumps(QUESTIONS))
    for task in (CHOICE, GENERATE):
        whole = {**COMMON, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{task['task']}.yaml").write_text(json.dumps(whole))  # JSON is YAML


def main(url: str, model: str, folder: Path) -> None:
    write_tasks(folder)
    done = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "remote",  # by /tokenize, /detokenize and /tokenizer_info: no transformers, no torch
            "num_concurrent": 4,
            "max_retries": 1,
        },
        tasks=["choose", "continue"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    print(json.dumps(done["results"], default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
