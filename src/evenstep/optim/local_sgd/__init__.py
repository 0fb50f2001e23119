"""Local SGD: ranks step on their own and average their parameters now and then.

Reading order: `local_sgd` (the class that users see), `state` (optimizer state that differs between ranks, and its
way into a checkpoint and back).
"""
