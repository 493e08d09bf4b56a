// SPDX-License-Identifier: Apache-2.0

package plugin_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/plugin"
)

// With a name in the configuration, DEL accepts any cniVersion, while STATUS rejects an invalid one.
func TestDelOfAnyVersion(t *testing.T) {
	for _, version := range []string{`1`, `{}`, `"9.9.9"`, `null`, `""`} {
		called := ""
		p := plugin.Plugin{Name: "x", Del: func(r *plugin.Request) error { called = r.Network; return nil }}
		for _, verb := range []string{"DEL", "STATUS"} {
			env := map[string]string{"CNI_COMMAND": verb, "CNI_CONTAINERID": "c", "CNI_IFNAME": "eth0"}
			var out, log bytes.Buffer
			exit := p.Run(func(name string) string { return env[name] }, strings.NewReader(fmt.Sprintf(`{"cniVersion":%s,"name":"net"}`, version)),
				&out, &log)
			if (exit == 0) != (verb == "DEL") {
				t.Errorf("%s with cniVersion %s: exit %d, %s", verb, version, exit, out.String())
			}
		}
		if called != "net" {
			t.Errorf("cniVersion %s: DEL got the network %q", version, called)
		}
	}
}
