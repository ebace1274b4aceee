import itertools

from tests.covering import others_slow, pairwise


def _pairs(cells):
    return {(one, other, cell[one], cell[other]) for cell in cells for one, other in itertools.combinations(range(len(cell)), 2)}


def test_every_two_values_that_meet_in_a_grid_meet_in_its_choice():
    whole = list(itertools.product("abcde", range(4), (True, False), "xyz"))
    holes = [cell for cell in whole if cell[:2] != ("a", 0) and (cell[1], cell[3]) != (3, "z")]
    for cells, most in ((whole, 26), (holes, 26), (whole[:1], 1), ([], 0)):
        chosen = pairwise(cells)
        assert set(chosen) <= set(cells) and _pairs(chosen) == _pairs(cells) and len(chosen) <= most
        assert chosen == [cell for cell in cells if cell in chosen] == pairwise(cells)


def test_the_whole_grid_is_there_when_slow():
    cells = list(itertools.product("ab", "cd", "ef"))
    given = others_slow(cells)
    assert [one.values for one in given] == cells
    assert [one.values for one in given if not one.marks] == pairwise(cells) and len(pairwise(cells)) == 4
