// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"cmp"
	"flag"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestFlags checks that the daemon accepts the flags in manifests of sriov-network-device-plugin. TestFlags also checks that each error
// contains the name of the wrong flag.
func TestFlags(t *testing.T) {
	t.Setenv("NODE_NAME", "node-7")
	dir := t.TempDir()
	var stderr bytes.Buffer
	o, level, err := parseFlags([]string{"--log-dir=sriovdp", "--log-level=10", "--resource-prefix=example.com", "-config-file", "/x",
		"--use-cdi", "--kubelet-dir", dir, "-v=10", "-logtostderr=true", "--alsologtostderr", "-stderrthreshold", "INFO"}, &stderr)
	if err != nil || level != slog.LevelDebug || o.Prefix != "example.com" || o.ConfigFile != "/x" || !o.UseCDI || o.Host != "node-7" ||
		o.Pods != filepath.Join(dir, "pod-resources") || o.Kubelet != (kubeletDirs{Plugins: defaultPlugins}) {
		t.Errorf("%+v, %s, %v", o, level, err)
	}
	registry := filepath.Join(dir, "plugins_registry")
	if err := os.Mkdir(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	for how, want := range map[string]string{"auto": registry, "registry": registry, "classic": ""} {
		if o, _, err := parseFlags([]string{"--kubelet-dir", dir, "--registration", how}, &stderr); err != nil || o.Kubelet.Registry != want {
			t.Errorf("%s: %q, %v", how, o.Kubelet.Registry, err)
		}
	}
	for says, args := range map[string][]string{"registration": {"--registration", "magic"}, "log-level": {"--log-level", "loud"},
		"poll 1ms":            {"--poll", "1ms"},
		"unexpected argument": {"now"}, "flag provided but not defined": {"--speed"}} {
		stderr.Reset()
		if status := Main(args, &stderr); status != 2 || !strings.Contains(stderr.String(), says) {
			t.Errorf("%q: status %d, %s", args, status, &stderr)
		}
	}
	stderr.Reset()
	if status := Main([]string{"--config-file", filepath.Join(dir, "none")}, &stderr); status != 1 ||
		!strings.Contains(stderr.String(), "no such file") {
		t.Errorf("status %d, %s", status, &stderr)
	}
	if status := Main([]string{"--help"}, &stderr); status != 0 {
		t.Errorf("--help: status %d", status)
	}
}

// TestDocumentedFlags checks that the README lists each flag with its default value.
func TestDocumentedFlags(t *testing.T) {
	text, err := os.ReadFile("../../../plugins/sriov-device-plugin/README.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| ([^|]*) \\|").FindAllStringSubmatch(string(text), -1)
	var names []string
	for _, m := range documented {
		names = append(names, m[1])
	}
	new(commandLine).defineFlags(io.Discard).VisitAll(func(f *flag.Flag) {
		i := slices.Index(names, f.Name)
		if i < 0 {
			t.Errorf("plugins/sriov-device-plugin/README.md lacks a flag: add the row \"| `--%s` | %s | MEANING |\"", f.Name,
				cmp.Or(strings.ReplaceAll("`"+f.DefValue+"`", "``", ""), "none"))
			return
		}
		if f.Name != "node-name" && f.DefValue != "" && documented[i][2] != "`"+f.DefValue+"`" {
			t.Errorf("plugins/sriov-device-plugin/README.md: --%s: the default is %s: write `%s`, not %s", f.Name, f.DefValue, f.DefValue, documented[i][2])
		}
		names = slices.Delete(names, i, i+1)
		documented = slices.Delete(documented, i, i+1)
	})
	if len(names) > 0 {
		t.Errorf("plugins/sriov-device-plugin/README.md: the daemon has no flags %q: remove their rows", names)
	}
}
