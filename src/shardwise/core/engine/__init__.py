"""Executing a schedule on a real model."""
