// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/attachment"
)

// hiddenText has characters that a terminal interprets or does not show: controls, direction changes, invisible, private and unassigned
// ones.
const hiddenText = "\x00\x1b[2J\x7f\u0080\u009b31m\u00ad\u200b\u200e\u2028\u2029\u202e\u2066\ufeff\ue000\uffff\U000e0001\U0010ffff"

// TestHiddenCharacters: commands print no hidden character in names of pods and files, and the JSON output preserves them.
func TestHiddenCharacters(t *testing.T) {
	const dir = "/run/podlace/hidden"
	key := attachment.Key{Network: "hidden", ContainerID: "a", IfName: "eth0"}
	record, err := json.Marshal(map[string]any{"format": 1, "network": "hidden", "containerID": "a", "ifname": "eth0", "plugin": "bridge",
		"pod": "shop/" + hiddenText, "netns": "/run/netns/" + hiddenText, "state": map[string]any{"bridge": hiddenText}})
	if err != nil {
		t.Fatal(err)
	}
	name := strings.ReplaceAll(hiddenText, "\x00", "")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(dir+"/bridge-"+key.Hash(), record, 0o600),
		os.WriteFile(dir+"/"+name, []byte(hiddenText), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, line := range []string{"ls", "ls -o json", "ls --network " + hiddenText, "limits", "limits -o json", "reload", "gc",
		"gc -o json", "rollback", hiddenText, "ls --" + hiddenText, "sriov reset " + hiddenText} {
		_, stdout, stderr := runPodlace(strings.Split(strings.ReplaceAll(line, "\x00", ""), " ")...)
		for _, text := range []string{stdout, stderr} {
			if i := strings.IndexFunc(text, func(r rune) bool { return r != '\n' && !strconv.IsPrint(r) }); i >= 0 {
				t.Errorf("podlace %q prints %q", line, text[i:])
			}
		}
	}
	_, stdout, stderr := runPodlace("ls", "-o", "json")
	var list []struct {
		Pod, Netns string
		Damaged    []struct{ Record string }
	}
	if err := json.Unmarshal([]byte(stdout), &list); err != nil {
		t.Fatalf("%v: %s%s", err, stdout, stderr)
	}
	for _, want := range []string{"shop/" + hiddenText, "/run/netns/" + hiddenText, dir + "/" + name} {
		if !slices.ContainsFunc(list, func(l struct {
			Pod, Netns string
			Damaged    []struct{ Record string }
		}) bool {
			return l.Pod == want || l.Netns == want || len(l.Damaged) > 0 && l.Damaged[0].Record == want
		}) {
			t.Errorf("%q is not in %s", want, stdout)
		}
	}
}
