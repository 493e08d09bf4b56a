# SPDX-License-Identifier: Apache-2.0
# failures.awk: reads the log of "go test -v" and prints, for each test that failed and has no failed part of its own: its name, what its comment
# promises, the last thing that it said, and the command that runs it alone.
/^=== (RUN|NAME|CONT) / { name = $3 }
/^ +[^ ]+\.go:[0-9]+: / { said[name] = $0 }
/^panic: / { said[name] = $0 }
/^ *--- FAIL: / { failed[++n] = $3 }
/^FAIL\t/ {
  for (i = 1; i <= n; i++) {
    leaf = 1
    for (j = 1; j <= n; j++) if (index(failed[j], failed[i] "/") == 1) leaf = 0
    if (leaf) tell($2, failed[i])
  }
  if (n == 0) print "\n" $2 ": does not build, or ended early"
  n = 0
  delete said
}
function tell(pkg, test,    dir, top, cause, promise, cmd, run) {
  dir = pkg
  sub(/^github.com\/podlace\/podlace/, ".", dir)
  top = test
  sub(/\/.*/, "", top)
  cmd = "grep -hs -A3 '^// " top "[ :]' " dir "/*_test.go | sed -n '/^\\/\\/ /{s/^\\/\\/ //;p}' | tr '\\n' ' '"
  cmd | getline promise
  close(cmd)
  sub(/\. .*/, ".", promise)
  cause = test in said ? said[test] : said[top]
  sub(/^ +/, "", cause)
  run = test
  gsub(/\//, "$/^", run)
  print "\n" test "\n  " (promise == "" ? "(no comment)" : promise) "\n  " (cause == "" ? "(it said nothing)" : cause) "\n  go test " dir " -count=1 -run '^" run "$'"
}
