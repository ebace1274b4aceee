# What the grids here share; read by `source`, with $work, $python and $encoder set. Two processes of one grid with the same work folder
# share its runs (`taskset -c 0`, `-c 1`: a core each).

# `program=` a script in place of `-m dpx` that takes the same overrides.
declare -A tried
# What is noted there as finished (`table.py --keep`) is not run again; with `kept=` the path of an empty folder all is.
kept=${kept:-$here/experiments/fine_tuning}

run() { # name, overrides
    local turn
    exec {turn}>"$1.turn"
    # Who holds the lock does the run; with an empty `wait_turn` the other waits for that, else it goes on to the next.
    if flock ${wait_turn--n} $turn; then once "$@"; fi
    exec {turn}>&-
}
once() { # name, overrides
    [ -z "${tried[$1]-}" ] || return 0
    tried[$1]=1
    ls outputs/"$1"-*/private/results.json >/dev/null 2>&1 && return
    grep -qs "^$1," "$kept/results.csv" "$kept/rates.csv" && return
    echo "$1 $(date -u +%H:%M)"
    # A line for each start: seconds by the clock and of the processors, and kilobytes held at most.
    local code=0
    # shellcheck disable=SC2086
    /usr/bin/time -a -o times.tsv -f "$1\t%e\t%U\t%S\t%M\t%x" "$python" ${program:--m dpx} name="$1" $encoder "${@:2}" >"$1.log" 2>&1 || code=$?
    [ $code = 0 ] || tail -n 2 "$1.log"
    # Ctrl-C and SIGTERM end the grid, a run that fails does not.
    [ $code -lt 128 ] || exit $code
}
trains() { # what is trained
    case $1 in lora | lora_ffa | bias) echo "train=$1 train.head=true" ;; *) echo "train=$1" ;; esac
}
rate_of() { # what is trained, work folder of SST-2
    "$python" "$here/experiments/fine_tuning/table.py" "$2" --kept "$kept" --rate "$1"
}
