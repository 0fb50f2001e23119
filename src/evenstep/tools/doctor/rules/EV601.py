"""fixed port (warning).

The port of the rendezvous is written into the script.

Two runs on one host collide, or join each other; the launcher's own port is overwritten.

Wrong:

```python
os.environ["MASTER_PORT"] = "29500"
```

Right:

```python
os.environ.setdefault("MASTER_ADDR", "localhost")
```

Launchers set `MASTER_ADDR` and `MASTER_PORT`. Only a run shows a fixed port. Ignore it if a firewall lets one
port through only.
"""

from evenstep.tools.doctor.scene import Scene, Seen


def seen(run: Scene) -> Seen:
    """All ranks used one port from the script. A free port that the script looks for differs between ranks."""
    made = [events[0] for events in run.evidence.of("init") if events]
    ports = {each["port"] for each in made}
    if len(made) == run.world_size and len(ports) == 1 and None not in ports:
        evidence = f"the group was made at port {ports.pop()}, whatever the launcher said"
        yield run.finding(made[0].place, evidence)
