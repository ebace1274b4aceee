"""Runs one job in several processes, on one machine or on many: who they are, what they tell each other, and what ends them."""

from dpx.processes.place import Place as Place
from dpx.processes.place import place as place
from dpx.processes.team import Team as Team
from dpx.processes.team import team as team
