"""What every kind of training shares: its settings, its examples as token ids, their lengths, and how it ends."""
