"""From a chat's output text to what it consists of: content, reasoning, tool calls."""
