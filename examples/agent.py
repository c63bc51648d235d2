"""An agent with two tools: the model calls them, this program runs them, the model answers. Needs `pip install openai`.

pinnate serve &   then   python examples/agent.py [http://127.0.0.1:8000] [question]
"""

import json
import sys
from typing import Any

from openai import OpenAI

base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the weather in Paris?"


def get_weather(city: str, unit: str = "celsius") -> str:
    return f"sunny in {city}, 21 degrees {unit}"


def multiply(a: float, b: float) -> float:
    return a * b


FUNCTIONS: dict[str, Any] = {"get_weather": get_weather, "multiply": multiply}


def tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Any:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


NUMBER = {"type": "number", "minimum": -1e6, "maximum": 1e6}
CITY = {"type": "string", "maxLength": 40}
UNIT = {"enum": ["celsius", "fahrenheit"]}
TOOLS = [
    tool("get_weather", "The weather in a city", {"city": CITY, "unit": UNIT}, ["city"]),
    tool("multiply", "The product of two numbers", {"a": NUMBER, "b": NUMBER}, ["a", "b"]),
]

client = OpenAI(base_url=f"{base}/v1", api_key="any")
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": question}]
for turn in range(4):
    # The first turn must call a tool, which the server's grammar sees to: even the smallest model's calls are valid.
    choice: Any = "required" if turn == 0 else "auto"
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print("answer:", message.content)
        break
    for call in message.tool_calls:
        try:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        except (KeyError, TypeError, ValueError) as error:  # the model reads what was wrong, and may try again
            result = f"error: {error}"
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
