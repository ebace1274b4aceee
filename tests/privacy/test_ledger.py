"""The ledger loses nothing that could have been seen, and charges each release once."""

import errno
import json
import os
import signal
import subprocess
import sys

import dp_accounting
import pytest

from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.files.records import from_json, to_json
from dpx.privacy import events
from dpx.privacy import ledger as ledgers
from dpx.privacy.hash_chain import Chain
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch, Plan
from dpx.privacy.origins import Origin
from dpx.privacy.segments import LedgerEntry, Segment, decode, encode, join, until
from dpx.statement import agreement

PLAIN = {"epoch": 0, "q": 0.01, "noise_multiplier": 1.0, "sampler": "poisson", "expected_batch_size": 64, "clipping_norm": 0.5}


def entry(**changes):
    return LedgerEntry(**(PLAIN | changes))


def fill(path, steps, **changes):
    ledger = Ledger(path)
    for step in steps:
        ledger.append(step, entry(**changes))
    return ledger


def forked(path, parent):
    """A new ledger of a run that was forked from that of `parent`."""
    ledger = Ledger(path)
    ledger.note_origins([Origin(kind="run", name="parent", identity=parent.identity, is_fork=True, segments=tuple(parent.own_segments()))])
    return ledger


def parts(runs):
    event = events.composed(ledgers.releases(runs), "zero_out", "pld")
    assert isinstance(event, dp_accounting.ComposedDpEvent)
    return event.events


def counted(runs):
    return [(release.sampling_probability, count) for release, count in ledgers.releases(runs)]


def test_a_step_is_one_tiny_line(tmp_path):
    fill(tmp_path / "ledger", range(1000))
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert [json.loads(line.partition(" ")[2]) for line in lines[2:]] == [{"kind": "step", "step": step} for step in range(1000)]
    assert max(map(len, lines[2:])) < 65


def test_read_back_is_what_was_entered(tmp_path):
    fill(tmp_path / "ledger", [0, 1])
    again = Ledger(tmp_path / "ledger")
    again.append(2, entry(q=0.02))
    assert list(Ledger(tmp_path / "ledger").entries()) == [(0, entry()), (1, entry()), (2, entry(q=0.02))]
    assert again.steps(0) == {0, 1, 2} and again.steps(1) == set()


def test_append_syncs_file_before_it_returns_and_creation_its_directory(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle)))
    ledger = Ledger(tmp_path / "ledger")
    assert str(tmp_path) in synced
    synced.clear()
    ledger.append(0, entry())
    assert synced == [str(tmp_path / "ledger")]


@pytest.mark.parametrize("lost", range(1, 6))
def test_a_torn_tail_is_dropped_and_written_over(tmp_path, lost):
    fill(tmp_path / "ledger", [9_997, 9_998, 9_999])
    whole = (tmp_path / "ledger").read_bytes()
    (tmp_path / "ledger").write_bytes(whole[:-lost])
    torn = Ledger(tmp_path / "ledger")
    assert torn.steps(0) == {9_997, 9_998}
    torn.append(9_999, entry())
    assert [step for step, _ in Ledger(tmp_path / "ledger").entries()] == [9_997, 9_998, 9_999]


@pytest.mark.parametrize("text", ["", "not json\n", '{"a": 1}\n', '{"ledger": "x", "format": 1}\n5\n', '{"ledger": "x", "format": 2}\n'])
def test_what_is_no_ledger_is_refused(tmp_path, text):
    (tmp_path / "ledger").write_text(text)
    with pytest.raises(ConfigError):
        Ledger(tmp_path / "ledger")


@pytest.mark.parametrize("facts", [{"ledger": 3}, {"trials": 5}])
def test_a_chain_of_another_format_is_no_ledger(tmp_path, facts):
    Chain(tmp_path / "ledger", facts).close()
    with pytest.raises(ConfigError, match=f"is in format {facts.get('ledger')}, not 7"):
        Ledger(tmp_path / "ledger")


@pytest.mark.parametrize("older", [5, 6])
def test_a_ledger_of_an_older_format_is_read_but_its_run_is_not_continued(tmp_path, older):
    (tmp_path / "private").mkdir()
    Chain(tmp_path / agreement.LEDGER, {"ledger": older}).close()
    fill(tmp_path / agreement.LEDGER, [0, 1])
    read = agreement.check(tmp_path)
    assert read is not None and read.steps(0) == {0, 1}
    with pytest.raises(
        ConfigError, match=f"is in format {older}, not 7: it is read, but this version draws the rows of a step otherwise. Continue with"
    ) as caught:
        agreement.before_training(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    ledger = fill(tmp_path / "ledger", [0])
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: pwrite(handle, data[: len(data) // 2], at))
    with pytest.raises(OSError):
        ledger.append(1234, entry())
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert ledger.steps(0) == {0}
    ledger.append(5, entry())
    assert [step for step, _ in Ledger(tmp_path / "ledger").entries()] == [0, 5]


@pytest.mark.parametrize("fault", ["EROFS", "EIO", "ESTALE", "ENODEV", "ENOTCONN"])
def test_a_disk_that_turned_read_only_or_is_gone_is_named_in_one_line_and_loses_no_charge(tmp_path, monkeypatch, fault):
    """The charge comes first, so nothing was drawn for the step that could not be entered."""
    ledger = fill(tmp_path / "ledger", [0])
    number, pwrite = getattr(errno, fault), os.pwrite

    def gone(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", gone)
    with pytest.raises(OSError) as caught:
        ledger.append(1, entry())
    refused = as_refused(caught.value)
    assert refused is not None and str(refused).startswith(f"{tmp_path / 'ledger'}: ") and "\n" not in str(refused)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not ledger.holds(1, entry())
    ledger.append(1, entry())
    assert [step for step, _ in Ledger(tmp_path / "ledger").entries()] == [0, 1]


def test_a_replayed_step_of_the_same_epoch_is_charged_once(tmp_path):
    fill(tmp_path / "ledger", range(10))
    runs = fill(tmp_path / "ledger", range(5, 12)).segments()
    assert counted(runs) == [(0.01, 12)] and runs[0].steps == ((0, 12),)


def test_a_step_of_a_new_epoch_is_charged_again(tmp_path):
    fill(tmp_path / "ledger", range(10))
    runs = fill(tmp_path / "ledger", range(5, 12), epoch=1).segments()
    assert counted(runs) == [(0.01, 17)]


def test_a_step_with_another_event_is_charged_beside_the_first(tmp_path):
    fill(tmp_path / "ledger", [0])
    assert counted(fill(tmp_path / "ledger", [0], q=0.02).segments()) == [(0.01, 1), (0.02, 1)]


def test_a_fork_inherits_everything_and_its_own_epoch_starts_empty(tmp_path):
    parent = fill(tmp_path / "parent", range(10))
    child = forked(tmp_path / "child", parent)
    child = forked(tmp_path / "child", parent)
    assert child.steps(0) == set()
    child.append(4, entry())
    assert counted(Ledger(tmp_path / "child").segments()) == [(0.01, 11)]


def test_branches_are_charged_jointly_with_their_common_past_once(tmp_path):
    parent = fill(tmp_path / "parent", range(10))
    branches = []
    for name in ("left", "right"):
        branch = forked(tmp_path / name, parent)
        branch.append(10, entry())
        branches.append(branch.segments())
    parent.append(10, entry())
    assert counted(join(parent.segments(), *branches)) == [(0.01, 13)]


def test_run_length_encoding_is_exact(tmp_path):
    ledger = fill(tmp_path / "ledger", [0, 1, 2, 7, 8, 11])
    ledger.append(12, entry(q=0.5))
    runs = ledger.segments()
    assert [run.steps for run in runs] == [((0, 3), (7, 2), (11, 1)), ((12, 1),)]
    assert encode(decode(runs)) == runs


def test_what_a_later_version_entered_beside_a_release_is_never_left_out(tmp_path):
    (segment,) = fill(tmp_path / "ledger", range(3)).segments()
    assert from_json(Segment, to_json(segment), "a statement") == segment
    with pytest.raises(ConfigError, match="second_sum_noise_multiplier.*its cost.*version of dpx"):
        from_json(Segment, to_json(segment) | {"second_sum_noise_multiplier": 0.5}, "a statement")


def test_charges_compose_equal_releases(tmp_path):
    (part,) = parts(fill(tmp_path / "ledger", range(6)).segments())
    assert part == dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 6)


def test_the_mixture_event_replaces_the_row_event_for_units_of_several_rows(tmp_path):
    (part,) = parts(fill(tmp_path / "ledger", [0], rows_per_unit=3).segments())
    assert isinstance(part, dp_accounting.SelfComposedDpEvent)
    assert isinstance(part.event, dp_accounting.dp_event.MixtureOfGaussiansDpEvent) and part.event.sensitivities[-1] == 3


@pytest.mark.parametrize("sampler", ["shuffled", "deterministic", "balls_in_bins"])
def test_without_amplification_each_started_pass_is_one_release(tmp_path, sampler):
    runs = fill(tmp_path / "ledger", range(21), sampler=sampler, q=0.1, size=640).segments()
    (charge,) = ledgers.releases(runs)
    assert charge[0].kind == sampler and charge[0].sampling_probability == 1 and charge[1] == 3


@pytest.mark.parametrize(("steps", "times"), [(range(12), 3), (range(13), 4), (range(3, 7), 1), ([2, 3, 4, 5, 6, 10, 13], 3)])
def test_under_cyclic_sampling_the_busiest_group_is_charged_at_its_own_rate(tmp_path, steps, times):
    assert counted(fill(tmp_path / "ledger", steps, sampler="cyclic_poisson", cycle=4).segments()) == [(0.04, times)]


def test_a_new_noise_epoch_begins_its_own_pass(tmp_path):
    fill(tmp_path / "ledger", range(15), sampler="shuffled", q=0.1)
    runs = fill(tmp_path / "ledger", range(12, 20), sampler="shuffled", q=0.1, epoch=1).segments()
    assert sum(count for _, count in ledgers.releases(runs)) == 3


def test_a_pass_is_charged_at_its_smallest_noise(tmp_path):
    fill(tmp_path / "ledger", [0, 1], sampler="shuffled", q=0.1)
    ((release, count),) = ledgers.releases(fill(tmp_path / "ledger", [2], sampler="shuffled", q=0.1, noise_multiplier=0.5).segments())
    assert (release.noise_multiplier, count) == (0.5, 1)


@pytest.mark.parametrize("sampler", ["truncated_poisson", "fixed_size"])
def test_units_of_rows_need_plain_poisson(tmp_path, sampler):
    runs = fill(tmp_path / "ledger", [0], sampler=sampler, size=640, cap=100, rows_per_unit=2).segments()
    with pytest.raises(ConfigError, match="several rows"):
        ledgers.releases(runs)


def test_kill_between_appends_keeps_every_step_that_was_announced(tmp_path):
    program = """
import sys
from dpx.privacy.ledger import Ledger, LedgerEntry
ledger = Ledger(sys.argv[1])
for step in range(10**6):
    ledger.append(step, LedgerEntry(epoch=0, q=.01, noise_multiplier=1., sampler="poisson", expected_batch_size=64, clipping_norm=.5))
    print(step, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "ledger")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 50:
            child.send_signal(signal.SIGKILL)
    announced = int(line)
    child.stdout.close()
    child.wait()
    last = max(Ledger(tmp_path / "ledger").steps(0))
    assert last is not None and last >= announced >= 50


def test_a_changed_line_is_found_by_itself(tmp_path):
    ledger = fill(tmp_path / "ledger", range(4))
    ledger.close()
    text = (tmp_path / "ledger").read_text()
    for changed in (text.replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'), text.replace('"step": 2}', '"step": 7}')):
        (tmp_path / "ledger").write_text(changed)
        with pytest.raises(ConfigError, match=r"line \d was changed, or one before it is missing"):
            Ledger(tmp_path / "ledger")
    lines = text.splitlines(keepends=True)
    (tmp_path / "ledger").write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(ConfigError, match="line 3 was changed, or one before it is missing"):
        Ledger(tmp_path / "ledger")


def test_a_mark_is_a_place_in_one_ledger_alone(tmp_path):
    ledger = fill(tmp_path / "ledger", range(3))
    early = ledger.mark
    ledger.append(3, entry())
    late = ledger.mark
    assert early is not None and late is not None
    assert ledger.missing(early) is None and ledger.missing(late) is None
    ledger.close()
    lines = (tmp_path / "ledger").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger").write_bytes(b"".join(lines[: early.position]))
    short = Ledger(tmp_path / "ledger")
    assert short.missing(early) is None and "ends at line" in (short.missing(late) or "")
    short.append(7, entry())
    assert "has another line" in (short.missing(late) or "")
    assert "is another chain" in (fill(tmp_path / "other", range(4)).missing(early) or "")


def test_released_lines_are_held_against_the_ledger_wherever_a_kill_cut_the_last_one(tmp_path):
    with_steps = fill(tmp_path / "private" / "ledger", range(3))
    mark, released = with_steps.mark, tmp_path / "release" / "telemetry.jsonl"
    assert mark is not None
    released.parent.mkdir()
    line = json.dumps({"epoch": 0, "step": 2, "ledger": to_json(mark)})
    for kept in range(len(line)):
        released.write_text(f"{line}\n{line[:kept]}")
        found = agreement.check(tmp_path)
        assert found is not None and found.identity == with_steps.identity
    released.write_text(line.replace(mark.digest, "00") + "\n")
    with pytest.raises(ConfigError, match=f"another line {mark.position}"):
        agreement.check(tmp_path)
    released.write_text(f"{line[:-1]}\n{line}\n")
    with pytest.raises(ConfigError, match="changed by hand"):
        agreement.check(tmp_path)


def test_the_digest_that_leaves_is_keyed(tmp_path):
    """Two ledgers with the same lines have other digests: an outsider who guesses the lines cannot check the guess."""
    one, other = (fill(tmp_path / name, range(3)).mark for name in ("a", "b"))
    assert one is not None and other is not None
    assert one.position == other.position and one.digest != other.digest
    assert (tmp_path / "a").read_text().count('"key"') == 1


def test_epochs_sums_and_plans_are_read_back(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    facts = {"from_step": 0, "start": None, "secret_tag": "t", "secret_place": 5, "fingerprint": {"data": "d"}, "why": "the run begins"}
    ledger.declare_plan(Plan(steps=3))
    ledger.open_noise_epoch(NoiseEpoch(number=0, name="first", **facts))
    ledger.append(0, entry(epoch_name="first"))
    ledger.record_sum("first", 0, "ab")
    ledger.open_noise_epoch(NoiseEpoch(number=1, name="second", **facts))
    ledger.note_choices(["steps"])
    again = Ledger(tmp_path / "ledger")
    assert [epoch.name for epoch in again.noise_epochs] == ["first", "second"] and again.plan == Plan(steps=3)
    assert again.sum_of("first", 0) == "ab" and again.sum_of("second", 0) is None and again.chosen_after_results == ["steps"]
    assert again.holds(0, entry(epoch_name="first")) and not again.holds(0, entry(epoch_name="second"))


def test_epochs_of_one_number_and_other_names_are_charged_apart(tmp_path):
    """Two copies of a folder both open epoch 1; jointly each of their steps counts."""
    parent = fill(tmp_path / "parent", range(4))
    branches = []
    for name in ("a", "b"):
        branch = forked(tmp_path / name, parent)
        for step in range(4, 6):
            branch._enter([(parent.identity, step, entry(epoch=1, epoch_name=name))])
        branches.append(branch.segments())
    assert counted(join(*branches)) == [(0.01, 4 + 2 + 2)]


def test_until_cuts_spans():
    early, late = (Segment(origin="a", steps=steps, **PLAIN) for steps in (((0, 5), (8, 4)), ((20, 1),)))
    assert until([early, late], 10) == [Segment(origin="a", steps=((0, 5), (8, 2)), **PLAIN)]
