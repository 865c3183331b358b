"""Configurations of DeepSpeed, Accelerate and Hugging Face programs, as settings of the trainer."""
