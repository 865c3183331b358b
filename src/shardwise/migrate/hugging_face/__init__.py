"""What Hugging Face's Trainer is told, and files of programs made of it: what every key becomes."""
