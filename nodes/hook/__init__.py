"""How a loaded model's attention is reached, and at which sigma."""
