"""The schedules of ciclo."""

from millstream.loops import Schedule as Schedule
from millstream.loops import after as after
from millstream.loops import always as always
from millstream.loops import every as every
from millstream.loops import never as never
from millstream.loops import piecewise as piecewise
