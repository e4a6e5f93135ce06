"""gguf-trainer: the small networks that local image generation runs on, trained as one DAG."""

__version__ = "0.1.0"
