"""A run's data set, or a trained policy, to the HF Hub: scanned, private first, with a card that is merged."""
