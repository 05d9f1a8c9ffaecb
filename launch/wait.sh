# Sourced by the launch scripts: waits for a job, and starts it again where it has failed.
#   RESTARTS         how often at most; default 0
#   RESTART_SECONDS  before the first new start, default 5; each next pause is twice as long, up to 300 s
# shellcheck shell=sh disable=SC2034  # the scripts that source this read its variables

wait_for_job() { # PID: waits until this background process has ended; sets code to its exit code
    code=0
    while kill -0 "$1" 2>/dev/null; do # a signal ends `wait` before the job is done
        wait "$1" && code=0 || code=$?
    done
    # It may have ended while a signal was handled: then code is that of the signal, and its own must still be read.
    wait "$1" 2>/dev/null && code=0 || { last=$?; [ "$last" = 127 ] || code=$last; } # 127: it was read before
}

# How to reach a job; a script redefines what its launcher needs otherwise.
ask_job() { kill -USR1 "$job"; } # to save and leave
end_job() { kill -TERM "$job"; } # at once
after_job() { :; }               # when it has ended; may change code

run_job() { # COMMAND...: runs it in a session of its own, where Ctrl-C does not reach it; sets code. Reads config
    restarts=${RESTARTS:-0} pause=${RESTART_SECONDS:-5} start=1 signalled=''
    case $restarts$pause in *[!0-9]*)
        echo "RESTARTS=$restarts RESTART_SECONDS=$pause: both must be whole numbers, 0 or more" >&2
        exit 2
        ;;
    esac
    if [ "$restarts" != 0 ]; then
        run=$("$PYTHON" -m megatron_noloco config --restarts "$config")
        requested=$(stop_request)
    fi
    trap on_signal INT TERM HUP
    job=''
    while :; do
        setsid "$@" </dev/null &
        job=$!
        [ -z "$signalled" ] || ask_job
        wait_for_job "$job"
        after_job
        job=''
        if [ "$restarts" = 0 ] || ! may_be_mended; then return; fi
        if [ "$start" -gt "$restarts" ]; then
            echo "the job has ended with exit code $code: that was start $start of $start" >&2
            return
        fi
        start=$((start + 1))
        echo "the job has ended with exit code $code: start $start of $((restarts + 1)) in $pause s" >&2
        left=$pause
        while [ "$left" -gt 0 ]; do
            if asked_to_stop; then return; fi
            sleep 1
            left=$((left - 1))
        done
        if asked_to_stop; then return; fi
        pause=$((pause < 150 ? 2 * pause : 300))
    done
}

on_signal() { # the second one ends the job at once
    if [ -z "$job" ]; then :; elif [ -z "$signalled" ]; then ask_job || true; else end_job || true; fi
    signalled=yes
}

may_be_mended() { # not: a mistake of the user, a missing program, SIGINT or SIGTERM
    case $code in 0 | 2 | 126 | 127 | 130 | 143) return 1 ;; esac
    ! asked_to_stop
}

asked_to_stop() { [ -n "$signalled" ] || [ "$(stop_request)" != "$requested" ]; }

stop_request() { cat "$run/stop" 2>/dev/null || true; } # what `megatron-noloco stop` wrote last
