#!/usr/bin/env bash
# Records docs/operators-day.md: an operator's day with the unit, each command run for real and shown with what it said.
# Run it where walk.sh runs, as root in a throw-away system with systemd:
#   sandbox.sh -t 300 -b TREE:TREE -b TARGET:TARGET -- TREE/systemd/day.sh BIN_DIR PORT >docs/operators-day.md
set -u
bin=$1 port=$2
export ERNIED_ADMIN_SOCKET=/run/ernied/admin.sock NO_COLOR=1 COLUMNS=130 SYSTEMD_COLORS=0 TERM=dumb
quiet() { "$@" >/dev/null 2>&1; }
say() { printf '\n%s\n' "$*"; }
cleaned() { sed -e 's/\x1b\[[0-9;]*m//g' -e 's/ek-[A-Za-z0-9_-]\{20,\}/ek-…(cut out)…/' -e "s/:$port\b/:8000/g" -e "s/\b$port\b/8000/g"; }
# Shows a command and what it prints; long output is cut in the middle.
run() {
  printf '\n```\n$ %s\n' "$1" | cleaned
  eval "$1" 2>&1 | cleaned | cut -c1-170 | awk -v max="${2:-24}" '
    { line[NR] = $0 } END { if (NR <= max) { for (i = 1; i <= NR; i++) print line[i] } else {
      for (i = 1; i <= max / 2; i++) print line[i]; print "…"; for (i = NR - max / 2 + 1; i <= NR; i++) print line[i] } }'
  echo '```'
}

cat <<'TEXT'
# An operator's day

Recorded by `systemd/day.sh` under a real systemd: every command was run, what it printed is shown as it came (long output is
cut in the middle, secrets are cut out).

## Morning: install, first start
TEXT
quiet env CARGO_TARGET_DIR="$(dirname "$bin")" "$bin/xtask" install --root / --prefix /usr --profile "$(basename "$bin")" --no-build
say 'The files are in place (`cargo xtask install --root / --prefix /usr`, or the .deb). What did it bring?'
run 'ls /usr/bin/ernie* /usr/lib/systemd/system/ernied* /usr/share/man/man8/ernied.8 /usr/share/bash-completion/completions/ernie-ctl /etc/ernied/ernied.toml'
sed -i "s/port = 8000/port = $port/" /etc/ernied/ernied.toml
mkdir -p /etc/systemd/system/ernied.service.d
printf '[Service]\nPrivateDevices=no\n' >/etc/systemd/system/ernied.service.d/day.conf
run 'systemd-sysusers && systemd-tmpfiles --create ernied.conf && systemctl daemon-reload && id ernied'
chgrp ernied /etc/ernied/ernied.toml && chmod 640 /etc/ernied/ernied.toml
say 'A look at the configuration before it counts, one mistake included:'
sed 's/^port = .*/port = 80000/; s/^demo = true/dmeo = true/' /etc/ernied/ernied.toml >/run/wrong.toml
run 'ernied check-config --config /run/wrong.toml'
run 'systemctl start ernied && systemctl status ernied --no-pager --lines 4'
run "curl -s localhost:$port/health; echo"
run "curl -s localhost:$port/v1/chat/completions -H 'content-type: application/json' -d '{\"messages\":[{\"role\":\"user\",\"content\":\"What is a hot swap?\"}],\"max_tokens\":40}'"
run 'ernie-ctl status'
run 'ernie-ctl doctor' 40

echo; echo '## A key for an application'
run 'ernie-ctl key create chat-app --rpm 600 --daily-tokens 2000000 --expires 90'
key=$(ernie-ctl --json key create second --rpm 600 | python3 -c 'import json,sys; print(json.load(sys.stdin)["secret"])')
say 'From now on nobody gets in without one:'
run "curl -s -o /dev/null -w '%{http_code}\\n' localhost:$port/v1/models"
for n in 1 2 3 4 5; do
  quiet curl -s "localhost:$port/v1/completions" -H "authorization: Bearer $key" -H 'content-type: application/json' -d "{\"prompt\":\"number $n\",\"max_tokens\":20}"
done
run 'ernie-ctl key list'
sleep 1
run 'ernie-ctl usage'
say 'A new secret with the same limits; the old one ends at once:'
run 'ernie-ctl key rotate second'
run "curl -s localhost:$port/v1/models -H 'authorization: Bearer $key' | head -c 200; echo"

echo; echo '## Noon: change a limit, look at the log'
printf '\n[limits]\nmax_queued_requests = 200\n' >>/etc/ernied/ernied.toml
run 'ernie-ctl config diff'
run 'systemctl reload ernied && ernie-ctl config show --changed --origin'
say 'What can not be applied is refused whole, and says so:'
cp /etc/ernied/ernied.toml /run/good.toml
printf '\n[engine]\nmax_num_seqs = 8\n' >>/etc/ernied/ernied.toml
run 'ernie-ctl reload; echo "exit status $?"'
cat /run/good.toml >/etc/ernied/ernied.toml
run 'ernie-ctl config set logging.slow_request 10s'
run 'ernie-ctl logs level info,ernied::supervisor=debug && ernie-ctl logs show'
run 'ernie-ctl logs level info'

echo; echo '## Afternoon: a new model, and back'
model=$(ls -d /var/lib/ernied/demo-model/*)
mkdir -p /srv/models && cp -r "$model" /srv/models/demo-v2 && chown -R root:ernied /srv/models && chmod -R g+rX /srv/models
run 'ernie-ctl swap /srv/models/demo-v2 --observe 5' 16
run 'ernie-ctl status | head -12'
run 'ernie-ctl rollback --reason "the answers read worse"'
for _ in $(seq 100); do ernie-ctl status | grep -q '^folder *\/var' && break; sleep 0.2; done
run 'ernie-ctl status | head -12'
say 'A model that was tampered with is not taken; the one that serves goes on:'
cp -r /srv/models/demo-v2 /srv/models/bad && printf 'x' | dd of=/srv/models/bad/model.safetensors bs=1 seek=4096 conv=notrunc status=none
chown -R root:ernied /srv/models/bad && chmod -R g+rX /srv/models/bad
run 'ernie-ctl swap /srv/models/bad --observe 5; echo "exit status $?"' 12

echo; echo '## Evening: a worker dies, and what was it?'
main=$(systemctl show -p MainPID --value ernied)
sleep 11 # the losing candidates have left, and what they wrote is not the newest any more
worker=$(pgrep -P "$main" | tail -1)
run "kill -9 $worker; sleep 2; ernie-ctl workers"
run 'ernie-ctl debug explain $(ls -t /var/lib/ernied/flight/*.json | head -1)' 40

echo; echo '## Who did what'
run 'ernie-ctl audit list' 40
run 'ernie-ctl audit verify'
run 'journalctl -u ernied -o cat --no-pager | tail -8'
run 'systemctl stop ernied && systemctl show -p Result,ExecMainStatus ernied'
