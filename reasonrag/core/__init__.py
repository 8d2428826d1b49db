"""What every room uses: values, errors, text and metrics, secrets, settings and configuration."""
