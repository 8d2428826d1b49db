"""Language models behind one protocol: OpenAI-compatible servers, transformers, vLLM, and scripted replies."""
