"""The result of a run, from the first worker to the launcher: through their store, which needs no
room on a disk.
"""

from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from planner.workers.job import TrainResult

_COUNT = "result/parts"
# Far below what the server takes in one message, which is 8 MiB.
_PART_BYTES = 2**20


def leave_result(store: Store, result: TrainResult) -> None:
    """Write the result into the workers' own keys of a store."""
    content = result.model_dump_json().encode()
    parts = [content[start : start + _PART_BYTES] for start in range(0, len(content), _PART_BYTES)]
    for number, part in enumerate(parts):
        # PyTorch's stub knows no bytes.
        store.set(f"result/{number}", part)  # type: ignore[arg-type]
    store.set(_COUNT, str(len(parts)))


def result_in(store: Store) -> TrainResult | None:
    """Return the result that was left in a store; None where there is none."""
    if not store.check([_COUNT]):
        return None
    parts = [store.get(f"result/{number}") for number in range(int(store.get(_COUNT)))]
    return TrainResult.model_validate_json(b"".join(parts))
