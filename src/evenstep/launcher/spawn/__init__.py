"""How a rank's process starts, and becomes the user's script.

Reading order:

1. `zygote`: a process that has imported torch, forked for every rank: [Note: ranks forked from a zygote].
2. `post_fork`: makes a forked rank like a process that python has just started.
3. `start_worker`: the file that python executes where there is no zygote; it dies with its launcher.
4. `script_runner`: prepares the process (heartbeat page, excepthook, faults) and runs the script as `__main__`.
5. `child`: a rank's process as the launcher sees it: [Note: signal before you reap].
6. `log_lines`: time, rank and step in front of every line of a log file.
"""
