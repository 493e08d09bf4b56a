// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/daemon/deviceplugin"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

const (
	devicePlugin = "plugins/sriov-device-plugin/README.md"
	manifest     = "conf/cluster/components/sriov/sriov-device-plugin.yaml"
)

func TestPools(t *testing.T) {
	texts := map[string]string{}
	for _, b := range parse(t, devicePlugin).blocksOf("json") {
		texts[parse(t, devicePlugin).at(b)] = b.text
	}
	paths, err := filepath.Glob(filepath.Join(treeRoot, "conf", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		texts[path] = readFile(t, "conf/"+filepath.Base(path))
	}
	inside := regexp.MustCompile(`(?m)config\.json: \|\n((?:    .*\n)+)`).FindStringSubmatch(readFile(t, manifest))
	if inside == nil || len(texts) < 2 {
		t.Fatalf("configurations are missing: %d", len(texts))
	}
	texts[manifest] = inside[1]
	for where, text := range texts {
		c, err := pool.Parse(pool.Source{File: where, Prefix: "intel.com"}, []byte(text))
		if err != nil || len(c.Resources) == 0 || len(c.Notes) > 0 {
			t.Errorf("%s: the device plugin would refuse this configuration, or a part of it: correct it: %v, %v", where, err, c)
		}
	}
}

// The DaemonSet uses only flags that the daemon has, mounts only folders, and requests no privileges.
func TestManifest(t *testing.T) {
	text := readFile(t, manifest)
	args := regexp.MustCompile(`args: \[(.*)\]`).FindStringSubmatch(text)
	if args == nil {
		t.Fatal("there are no args")
	}
	var said bytes.Buffer
	if status := deviceplugin.Main(append(strings.Split(args[1], ", "), "--help"), &said); status != 0 {
		t.Errorf("%s: the daemon refuses the args %s: correct them, or add the flag: %s", manifest, args[1], &said)
	}
	mounted := regexp.MustCompile(`hostPath: \{path: (\S+), type: (\w+)\}`).FindAllStringSubmatch(text, -1)
	for _, m := range mounted {
		if m[2] != "DirectoryOrCreate" || !strings.Contains(text, fmt.Sprintf("mountPath: %s}", m[1])) &&
			!strings.Contains(text, fmt.Sprintf("mountPath: %s,", m[1])) {
			t.Errorf("%s: %s is a %s, or is mounted at another path: write type: DirectoryOrCreate, and the same path as mountPath", manifest, m[1], m[2])
		}
	}
	if len(mounted) != strings.Count(text, "hostPath:") || len(mounted) < 5 {
		t.Errorf("%s: %d hostPaths have the form \"hostPath: {path: PATH, type: TYPE}\": write all of them, at least 5, in this form", manifest,
			len(mounted))
	}
	if !strings.Contains(text, "capabilities: {drop: [ALL]}") || strings.Contains(text, "privileged: true") || strings.Contains(text, "add:") {
		t.Errorf("%s asks for privileges: write \"capabilities: {drop: [ALL]}\", without add and without privileged: true", manifest)
	}
}
