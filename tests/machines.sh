#!/bin/sh
# The fast tests as other machines would run them: every CPU capability of torch x one and two threads, and once with
# eight busy processes beside them. Prints a table; ends with 1 where a run failed. `make machines` starts it.
#   RUNS="avx2:1 native:1:busy" sh tests/machines.sh    # some of the runs: capability:threads[:busy]
#   LOGS=folder sh tests/machines.sh                    # keeps what each run printed
set -u
cd "$(dirname "$0")/.." || exit 2
venv=${VENV:-.venv}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs" || exit 2
bad=0
spinners=""
stop_busy() { [ -z "$spinners" ] || kill $spinners 2>/dev/null; spinners=""; }
trap 'stop_busy; [ -n "${LOGS:-}" ] || rm -rf "$logs"' EXIT
trap 'exit 130' INT TERM

printf '%-10s %-8s %-6s %-8s %-9s %s\n' capability threads load exit seconds result
for run in ${RUNS:-native:1 native:2 avx2:1 avx2:2 default:1 default:2 native:1:busy}; do
  capability=${run%%:*}
  rest=${run#*:}
  threads=${rest%%:*}
  log=$logs/$(echo "$run" | tr : -).log
  load=-
  patience=${LIMBECK_TEST_PATIENCE:-1}
  case $run in
    *:busy)
      load=busy
      patience=3
      for _ in 1 2 3 4 5 6 7 8; do (while :; do :; done) & spinners="$spinners $!"; done ;;
  esac
  [ "$capability" = native ] && unset ATEN_CPU_CAPABILITY || export ATEN_CPU_CAPABILITY="$capability"
  start=$(date +%s)
  LIMBECK_TEST_PATIENCE=$patience OMP_NUM_THREADS=$threads make unit VENV="$venv" >"$log" 2>&1
  code=$?
  stop_busy
  result=$(grep -E '[0-9]+ (passed|failed)' "$log" | tail -n 1 | tr -d '=' | sed 's/^ *//; s/ in .*//')
  printf '%-10s %-8s %-6s %-8s %-9s %s\n' "$capability" "$threads" "$load" "$code" $(($(date +%s) - start)) "$result"
  if [ $code != 0 ]; then
    bad=1
    grep -E '^(FAILED|ERROR)' "$log" | head -n 20
  fi
done
exit $bad
