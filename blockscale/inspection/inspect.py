"""`inspect`, the verb: a folder, a .gguf file or a hub id. Lies here and not in `api`, which needs torch."""

from pathlib import Path

from blockscale.inspection.contents import Progress, inspect_folder
from blockscale.inspection.inventory import Inspection
from blockscale.inspection.page import write_inspection


def inspect(
    model: str | Path, *, scales: bool = False, report: str | Path | None = None, progress: Progress | None = None
) -> Inspection:
    """What a checkpoint or 16-bit model holds, by layer, and which engines load it. Reads headers, configs and the
    scales that stand alone.

    scales  read and count every block scale, too
    report  where to write an HTML page

    Goes on past faults; raises CheckpointError where there is no model, OutputError where the page cannot be written.
    """
    result = inspect_folder(_folder(model), with_scales=scales, progress=progress)
    if report is not None:
        write_inspection(result, report)
    return result


def _folder(model: str | Path) -> Path:
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError):  # `locate` says what is wrong with it
        pass
    from blockscale.checkpoint.locate import locate

    return locate(model)
