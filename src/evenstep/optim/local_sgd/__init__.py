"""Local SGD: ranks step independently and average their parameters from time to time.

Reading order: `local_sgd` (the class that users see), `state` (optimizer state that differs between ranks: saved,
loaded and averaged).
"""
