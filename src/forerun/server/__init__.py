"""The HTTP side: OpenAI's API over the engine's output streams. No torch."""
