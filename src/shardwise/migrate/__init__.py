"""Configurations of DeepSpeed, Accelerate and Hugging Face, as they are: what every key becomes."""
