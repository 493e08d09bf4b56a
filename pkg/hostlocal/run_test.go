// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// lab is a test network with its own lease folder.
type lab struct {
	*testing.T
	network string
	netns   string
	dir     string // lease folder
	ipam    string // keys of the "ipam" object
}

// labs numbers the networks, so that no lab sees the records of another.
var labs atomic.Int64

func labIn(t *testing.T, netns, dir, ipam string) lab {
	network := fmt.Sprint("net", labs.Add(1))
	return lab{t, network, netns, filepath.Join(dir, network), fmt.Sprintf(`"type":"host-local","dataDir":%q,%s`, dir, ipam)}
}

func newLab(t *testing.T, ipam string) lab {
	t.Helper()
	return labIn(t, kerneltest.NewPod(t).Path, t.TempDir(), ipam)
}

// newQuickLab returns a lab in the sandbox's own namespace, which is enough, because the plugin only checks that the path exists.
func newQuickLab(t *testing.T, ipam string) lab {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "lab") // on tmpfs
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return labIn(t, "/proc/self/ns/net", dir, ipam)
}

// answer is the result or the error of a plugin call.
type answer struct {
	IPs []struct {
		Address, Gateway string
	} `json:"ips"`
	Routes []struct{ Dst, GW string } `json:"routes"`
	DNS    struct{ Nameservers []string }
	Code   uint   `json:"code"`
	Msg    string `json:"msg"`
	Detail string `json:"details"`
	log    string
}

// addresses returns all addresses of a result as one text.
func (a answer) addresses() string {
	var list []string
	for _, ip := range a.IPs {
		list = append(list, ip.Address)
	}
	return strings.Join(list, " ")
}

// call runs a CNI command for eth0 of a container. more contains additional configuration keys.
func (l lab) call(verb, id, more string, env ...string) answer {
	l.Helper()
	return l.callFor(verb, plugin.Attachment{ContainerID: id, IfName: "eth0"}, more, env...)
}

func (l lab) callFor(verb string, of plugin.Attachment, more string, env ...string) answer {
	l.Helper()
	if more != "" {
		more = "," + more
	}
	getenv := func(name string) string {
		for _, kv := range env {
			if value, ok := strings.CutPrefix(kv, name+"="); ok {
				return value
			}
		}
		return map[string]string{"CNI_COMMAND": verb, "CNI_CONTAINERID": of.ContainerID, "CNI_IFNAME": of.IfName, "CNI_NETNS": l.netns,
			"CNI_PATH": "/"}[name]
	}
	stdin := fmt.Sprintf(`{"cniVersion":"1.1.0","name":%q,"type":"host-local","ipam":{%s}%s}`, l.network, l.ipam, more)
	var stdout, stderr bytes.Buffer
	exit := Plugin().Run(getenv, strings.NewReader(stdin), &stdout, &stderr)
	var a answer
	if err := json.Unmarshal(stdout.Bytes(), &a); stdout.Len() > 0 && err != nil {
		l.Errorf("%s: %v in %s", verb, err, stdout.String())
	}
	if (exit == 0) != (a.Code == 0) {
		l.Errorf("%s: exit %d with %s", verb, exit, stdout.String())
	}
	a.log = stderr.String()
	return a
}

func (l lab) mustGive(id, want string) {
	l.Helper()
	if a := l.call("ADD", id, ""); a.addresses() != want {
		l.Errorf("ADD %s: %+v, want %s", id, a, want)
	}
}

// mustFail checks the code of an error and that its message contains a text.
func (l lab) mustFail(a answer, code uint, says string) {
	l.Helper()
	if a.Code != code || !strings.Contains(a.Msg, says) {
		l.Errorf("got %+v, want code %d and %q", a, code, says)
	}
}

func (l lab) ok(a answer) {
	l.Helper()
	if a.Code != 0 {
		l.Errorf("got %+v, want success", a)
	}
}

// files returns the mode and content of each file in the lease folder but the boot file.
func (l lab) files() map[string]string {
	l.Helper()
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		l.Fatal(err)
	}
	files := map[string]string{}
	for _, e := range entries {
		if e.Name() == bootFile {
			continue
		}
		info, err := e.Info()
		if err != nil {
			l.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(l.dir, e.Name()))
		if err != nil {
			l.Fatal(err)
		}
		files[e.Name()] = fmt.Sprintf("%o %q", info.Mode(), data)
	}
	return files
}

// age makes all leases and records old, so that GC may collect them.
func (l lab) age() {
	l.Helper()
	if err := kerneltest.Age(l.dir, filepath.Join(store.Root, l.network)); err != nil {
		l.Fatal(err)
	}
}

// put writes a file to the lease folder, as another program would.
func (l lab) put(name, content string) {
	l.Helper()
	if err := os.MkdirAll(l.dir, 0o755); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.dir, name), []byte(content), 0o644); err != nil {
		l.Fatal(err)
	}
}

func prev(addresses ...string) string {
	var ips []string
	for _, a := range addresses {
		ips = append(ips, `{"address":"`+a+`"}`)
	}
	return `"prevResult":{"cniVersion":"1.1.0","ips":[` + strings.Join(ips, ",") + `]}`
}
