"""How the shipped policies in `reasonrag/demo/` were trained: `python -m tools.demo_policy --out FOLDER`."""
