"""`fastweights reproduce`: the papers' claims, measured again."""

from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.authoring import (
    Console,
    Device,
    DryRun,
    Overwrite,
    Quiet,
    StopSignals,
    one_line_errors,
    output_path,
    show,
    show_plan,
    training_errors,
)

from ._options import FEWER, Workers, check_trainings

PAPERS = "pdn, gka, palimpsa, lattice, vla, own"  # those of fastweights_studies.claims (a test compares them)
CONTINUES = "the same command continues where trainings stopped"


def reproduce(
    claims: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLAIM]...", help="Claims to measure, such as C1 S3.", show_default=False),
    ] = None,
    list_claims: Annotated[
        bool, typer.Option("--list", help="List the claims, what was expected and what was found, and exit.")
    ] = False,
    paper: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"All claims of a paper that fit the device, or our own results: {PAPERS}."),
    ] = None,
    device: Device = "cpu",
    seeds: Annotated[
        list[str] | None, typer.Option(metavar="N,...", help="Seeds; the claim's own if not given.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option(parser=output_path, metavar="FOLDER", help="Folder for the results, one file per claim."),
    ] = Path("runs/claims"),
    overwrite: Overwrite = False,
    measurements: Annotated[
        Path, typer.Option(help="Folder with the benchmarks' result files, for claims about speed.")
    ] = Path("studies/results"),
    workers: Workers = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,  # taken as by the other commands; this one shows no progress
) -> None:
    """Measure claims of the papers again and say which hold.

    Each claim has a setting, the paper's numbers, the outcome that was expected and the rule that decides. A claim that does not
    hold is a result: the exit code is 0.
    """
    with one_line_errors(CONTINUES, FEWER), StopSignals():
        from ..claims import (
            Conditions,
            claims_of,
            committed_records,
            find_claim,
            load_records,
            run_claim,
            save_record,
        )
        from ..claims.record import claimed_records, record_path
        from ..claims.tables import claim_page, claims_table
        from ..trained_folders import remove_trainings

        named = [find_claim(name) for name in claims or ()]
        chosen = named or (list(claims_of(paper)) if paper or list_claims else [])
        if named and paper:
            raise ValueError("--paper must be left out where claims are named; drop one of the two")
        if not chosen:
            raise ValueError("name at least one claim, or pass --paper NAME or --list, which shows the claims")
        if list_claims:
            # A result of this machine replaces the committed one.
            records = {**committed_records(), **load_records(output)}
            tables = [chosen] if named or paper else [chosen, list(claims_of("own"))]
            for claims_shown in tables:
                Console().print(claims_table(claims_shown, records))
            return
        given = check_trainings(device, output, workers, seeds)
        names = [claim.name for claim in chosen]
        with claimed_records("--output", output, names, device, overwrite=overwrite and not dry_run):
            if dry_run:
                plans = [
                    {
                        "name": claim.name, "says": claim.says, "setting": claim.setting,
                        "cost": f"{claim.cost} ({claim.device})", "seeds": given or claim.seeds,
                        "output": str(record_path(output, claim.name, device)),
                    }
                    for claim in chosen
                ]  # fmt: skip
                show_plan({"claim": plans})
                return
            for claim in chosen:
                if not named and device == "cpu" and claim.device == "cuda" and claim.measure is not None:
                    show(f"{claim.name}: left out, needs --device cuda ({claim.cost})")
                    continue
                if overwrite:
                    for name in {claim.name, claim.result_name(device)}:
                        remove_trainings(output / "trained" / name)
                conditions = Conditions(
                    seeds=given or claim.seeds, device=device, folder=output / "trained", measurements=measurements,
                    workers=workers,
                )  # fmt: skip
                with training_errors(CONTINUES, f"{claim.name}: "):
                    record = run_claim(claim, conditions)
                path = save_record(output, record)
                Console().print(claim_page(claim, record))
                show(f"Result: {path}\n")
