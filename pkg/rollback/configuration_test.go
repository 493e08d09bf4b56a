// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFindConfiguration: the first file of the network counts, list or single plugin.
func TestFindConfiguration(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"05-notes.txt":     `{"name": "a", "type": "bridge", "ipMasqBackend": "no configuration"}`,
		"10-a.conflist":    `{"name": "a", "plugins": [{"type": "bridge", "ipMasqBackend": "first", "ipam": {"dataDir": "/d"}}, {"type": "portmap", "backend": "p"}]}`,
		"20-a.conflist":    `{"name": "a", "plugins": [{"type": "bridge", "ipMasqBackend": "second"}]}`,
		"30-b.conf":        `{"name": "b", "type": "bridge", "ipMasqBackend": "single"}`,
		"40-torn.conflist": `{"name": "c", "plugins": [`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ network, plugin, has, dataDir string }{
		{"a", "bridge", "first", "/d"}, {"a", "portmap", `"p"`, "/d"}, {"b", "bridge", "single", ""},
	} {
		conf, err := findConfiguration(dir, c.network)
		if err != nil || !strings.Contains(string(conf.plugin(c.plugin)), c.has) || conf.dataDir() != c.dataDir {
			t.Errorf("%s %s: %s, %q, %v", c.network, c.plugin, conf.plugin(c.plugin), conf.dataDir(), err)
		}
	}
	if conf, err := findConfiguration(dir, "b"); err != nil || conf.plugin("portmap") != nil {
		t.Errorf("a plugin that is not named: %s, %v", conf.plugin("portmap"), err)
	}
	if _, err := findConfiguration(dir, "c"); err == nil || !strings.Contains(err.Error(), "40-torn.conflist") {
		t.Errorf("a torn file: %v", err)
	}
	if conf, err := findConfiguration(filepath.Join(dir, "missing"), "a"); err != nil || conf != nil {
		t.Errorf("no folder: %v, %v", conf, err)
	}
}
