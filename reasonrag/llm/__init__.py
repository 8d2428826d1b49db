"""Language models behind one protocol: OpenAI-compatible servers, transformers and vLLM."""
