"""`python -m reasonrag`, which is what `accelerate launch -m reasonrag` starts."""

from reasonrag.cli import main

if __name__ == "__main__":
    main()
