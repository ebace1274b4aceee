"""A callback is told released values in frozen copies, and stops no run; only a declaration gives it more."""

import dataclasses

import pytest

from dpx.config import recipes
from dpx.config.callback import Callback, Moment
from dpx.config.experiment import Schedule
from dpx.declaration import ConfigError, declaration
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.privacy.ledger import Ledger
from dpx.training import session
from dpx.training.callbacks import Callbacks

from ..made_statement import made_statement
from .conftest import declare

LINE = {"epoch": 0, "step": 1, "loss": 2.5}


@declaration
class Listens(Callback):
    told: list[tuple[str, Moment]] = dataclasses.field(default_factory=list)

    def on_start(self, moment: Moment) -> None:
        self.told.append(("start", moment))

    def on_save(self, moment: Moment) -> None:
        self.told.append(("save", moment))


@declaration
class Leaves(Callback):
    def on_save(self, moment: Moment) -> None:
        raise SystemExit("enough\nof this")


@pytest.mark.parametrize("protected", [False, True])
def test_a_callback_is_told_what_was_published_since_and_more_only_by_declaration(tmp_path, protected):
    listens, stated = Listens(protected=protected), made_statement(Ledger(tmp_path / "ledger"), epsilon={"rdp": 8.0})
    callbacks = Callbacks({"one": listens}, "main-1", 4)
    callbacks.publish([], stated)
    callbacks.tell("on_start", 0)
    callbacks.measure({"train/loss": 0.125})
    callbacks.publish([LINE], stated)
    callbacks.tell("on_save", 2)
    (_, first), (_, then) = listens.told
    assert (first.step, first.steps, first.released, first.name) == (0, 4, (), "main-1")
    assert [dict(line) for line in then.released] == [LINE] and then.protected == ({"train/loss": 0.125} if protected else None)
    for node in (then.released[0], then.protected):
        with pytest.raises(TypeError):
            node["loss"] = 0.0  # pyright: ignore
    then.statement.epsilon.clear()  # pyright: ignore
    assert stated.epsilon == {"rdp": 8.0}, "it has a copy"


def test_a_callback_does_not_give_itself_more_while_the_run_goes_on(tmp_path):
    listens = Listens()
    callbacks = Callbacks({"one": listens}, "main-1", 4)
    callbacks.publish([], made_statement(Ledger(tmp_path / "ledger")))
    object.__setattr__(listens, "protected", True)
    callbacks.measure({"train/loss": 0.125})
    callbacks.tell("on_save", 1)
    assert listens.told[0][1].protected is None


def test_a_callback_that_fails_is_dropped_with_one_line(tmp_path, capsys):
    listens = Listens()
    callbacks = Callbacks({"goes": Leaves(), "stays": listens}, "main-1", 4)
    callbacks.publish([], made_statement(Ledger(tmp_path / "ledger")))
    for step in (1, 2):
        callbacks.tell("on_save", step)
    assert capsys.readouterr().err == "callbacks.goes is dropped (on_save: enough); the run goes on\n"
    assert [moment.step for _, moment in listens.told] == [1, 2]


def test_who_is_given_more_is_declared_by_name_and_is_part_of_the_claim(tmp_path):
    one, more = declare(callbacks={"one": Listens()}), declare(callbacks={"one": Listens(protected=True)})
    assert one.given_protected == () and more.given_protected == ("callbacks.one (tests)",)
    assert more.claim.given_protected and {part.package for part in one.claim.outside} == {"tests"}
    assert one.claim_checksum == more.claim_checksum == declare().claim_checksum, "it may come and go in a run"


def test_a_run_without_noise_stops_where_an_example_has_no_finite_gradient():
    assert declare(mechanism=NoPrivacy(), schedule=Schedule(stop_at_non_finite=True))
    session.require_finite(1, {"train/non_finite_examples": 0.0, "train/examples": 8.0})
    with pytest.raises(ConfigError, match="^step 2: 3 of 8 examples have a gradient that is not finite"):
        session.require_finite(2, {"train/non_finite_examples": 3.0, "train/examples": 8.0})
    with pytest.raises(ConfigError, match="^schedule.stop_at_non_finite=true: a private run does not show"):
        declare(schedule=Schedule(stop_at_non_finite=True))


def test_a_preset_changes_the_recipe_whatever_its_place_in_the_command():
    for place in (["debug=quick", "+experiment=anil_2m_batch"], ["+experiment=anil_2m_batch", "+debug=quick"]):
        cfg = recipes.compose(place)
        assert (cfg.steps, cfg.schedule.evaluate_every) == (3, 1)
    assert recipes.compose(["debug=quick", "steps=5"]).steps == 5, "a value of the command still wins"
    assert recipes.compose(["debug=nan"]).schedule.stop_at_non_finite is True, "nan is a name here, and no number"
