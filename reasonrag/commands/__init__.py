"""What the commands do once their settings are resolved."""
