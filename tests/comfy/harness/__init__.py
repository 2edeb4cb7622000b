"""Start the real ComfyUI, build prompts for it, and read what it did."""
