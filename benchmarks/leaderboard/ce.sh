#!/bin/sh
# sh benchmarks/leaderboard/ce.sh CORPUS WORK    CORPUS is what benchmarks/quality/corpus.py wrote
set -eu
cd "$(dirname "$0")/../.."
PYTHONPATH=. exec python benchmarks/quality/suite.py "$1" "$2" \
    --arms ce --pairs coarse fine --seeds 1 2 3 --minutes 600
