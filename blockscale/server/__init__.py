"""The engine over HTTP, as OpenAI's API has it."""
