#!/usr/bin/env bash
# The step of ../action.yml: its inputs come as variables of the environment.
set -uo pipefail

fail() { echo "Error: $1" >&2; exit 2; }

[[ -n ${RECORDING:-} || -n ${CONFIG:-} ]] || fail "name a recording or a config."
[[ -z ${BASELINE:-} || -n ${RECORDING:-} ]] || fail "baseline needs a recording."
[[ -z ${MAX_GROWTH:-} || -n ${BASELINE:-} ]] || fail "max-growth needs a baseline."
[[ -z ${MAX_PEAK:-} || -n ${RECORDING:-} ]] || fail "max-peak needs a recording."
[[ -z ${MEMORY_LIMIT:-}${GPU:-} || -n ${CONFIG:-} ]] || fail "memory-limit and gpu need a config."
if [[ ${INSTALL:-true} == true ]]; then
    python3 -m pip install --quiet "$GITHUB_ACTION_PATH" || fail "ligerprof was not installed."
fi

text=$(mktemp)
code=0

# A title, then the command's Markdown, and its error if it has one.
report() {
    local title=$1 failed
    shift
    failed=$(mktemp)
    { echo "### $title"; echo; } >>"$text"
    ligerprof "$1" --format markdown "${@:2}" >>"$text" 2>"$failed"
    local ended=$?
    cat "$failed" >&2
    # an error is worse than a limit that is exceeded
    if [[ $ended -ne 0 && ($code -eq 0 || $ended -ne 3) ]]; then code=$ended; fi
    if [[ $ended -ne 0 ]]; then { echo; echo "**$(tail -n 1 "$failed" | sed 's/[][\\`*_<>|~&@#]/\\&/g')**"; } >>"$text"; fi
    echo >>"$text"
}

if [[ -n ${CONFIG:-} ]]; then
    report "Estimated memory" estimate --config "$CONFIG" \
        ${MEMORY_LIMIT:+--memory-limit="$MEMORY_LIMIT"} ${GPU:+--gpu="$GPU"}
fi
if [[ -n ${BASELINE:-} ]]; then
    report "Change of the peak" diff ${MAX_GROWTH:+--max-growth="$MAX_GROWTH"} -- "$BASELINE" "$RECORDING"
fi
if [[ -n ${RECORDING:-} ]]; then
    report "Peak memory" explain ${MAX_PEAK:+--max-peak="$MAX_PEAK"} -- "$RECORDING"
fi

cat "$text"
if [[ -n ${GITHUB_STEP_SUMMARY:-} ]]; then cat "$text" >>"$GITHUB_STEP_SUMMARY"; fi
if [[ ${COMMENT:-true} == true && -n ${PULL_REQUEST:-} ]]; then
    # the comment of the last run is replaced
    gh pr comment "$PULL_REQUEST" --repo "$GITHUB_REPOSITORY" --body-file "$text" --edit-last --create-if-none ||
        echo "Warning: the comment was not written. Does the job have the permission pull-requests: write?" >&2
fi
exit "$code"
