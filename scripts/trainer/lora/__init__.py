"""LoRA packs: a diffusion model learns what one's own pictures show."""
