"""Stream a chat from a running server with nothing but the standard library.

pinnate serve &   then   python examples/client.py [http://127.0.0.1:8000] [question]
"""

import json
import sys
import urllib.request

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
question = sys.argv[2] if len(sys.argv) > 2 else "Why is the sky blue?"
body = {
    "messages": [{"role": "user", "content": question}],
    "max_tokens": 64,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
request = urllib.request.Request(
    f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request) as reply:
    for line in reply:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if event.get("usage"):
            print("\n", event["usage"], sep="")
