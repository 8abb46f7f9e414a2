"""The page docs/load_states.md, printed from the tables: `python -m cluster.scheduling.load_state_doc`."""

from __future__ import annotations

from cluster.scheduling.load_events import EVENTS
from cluster.scheduling.load_state import MEANINGS, SETTLES, TRANSITIONS, LoadState


def state_diagram() -> str:
    """The tables as a Mermaid diagram, without the events that change no state."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, row in TRANSITIONS.items():
        for event, to in row.items():
            if to is not state:
                arrows.setdefault((state.name, to.name), []).append(event.__name__)
    for (state, all_ready), to in SETTLES.items():
        label = "all ranks ready" if all_ready else "a rank is not ready"
        arrows.setdefault((state.name, to.name), []).append(label)
    lines = ["stateDiagram-v2", f"    [*] --> {LoadState.PLANNING.name}"]
    lines += [f"    {start} --> {end}: {', '.join(labels)}" for (start, end), labels in arrows.items()]
    lines += [f"    {state.name} --> [*]" for state in LoadState if state.is_terminal]
    return "\n".join(lines)


def render_doc() -> str:
    """The text of docs/load_states.md."""
    meanings = "\n".join(f"| {state.name} | {MEANINGS[state]} |" for state in LoadState)
    events = "\n".join(f"| {kind.__name__} | {(kind.__doc__ or '').rstrip('.')} |" for kind in EVENTS)
    return f"""# The states of a load

Printed from the tables in `cluster/scheduling/load_state.py`; print it again with
`python -m cluster.scheduling.load_state_doc > docs/load_states.md`.

| state | meaning |
|---|---|
{meanings}

```mermaid
{state_diagram()}
```

Arrows with a lower-case label follow from the ranks alone, whatever the last event was. Events that are not on an
arrow out of a state change no state there. Late and repeated events change nothing; FAILED and RELEASED are final.

| event | what happened |
|---|---|
{events}
"""


if __name__ == "__main__":
    print(render_doc(), end="")
