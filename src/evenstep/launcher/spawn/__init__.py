"""How a rank's process starts, and becomes the user's script.

Reading order:

1. `zygote`: a process that has imported torch, forked for every rank: [Note: ranks forked from a zygote]. A forked rank
   is made like a process that python has just started.
2. `start_worker`: the file that python executes if there is no zygote; its process dies with its launcher.
3. `script_runner`: prepares the process (heartbeat page, excepthook, faults) and runs the script as `__main__`, or
   functions that a pool sends.
4. `own_ranks`: refuses a script that starts its own ranks.
5. `remote`: functions that a parent process runs on its ranks: the messages of both, and the rank's side.
6. `child`: a rank's process as the launcher sees it, and how it is stopped: [Note: signal before you reap].
7. `guard`: ends the processes that ranks have started, if the launcher is killed.
8. `log_lines`: puts time, rank and step in front of every line of a log file.
"""
