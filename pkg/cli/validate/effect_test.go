// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"strings"
	"testing"
)

// TestEffects: valid settings that make ADD fail or cut off the pod are found, and the hint is that of ADD.
func TestEffects(t *testing.T) {
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"UTF-16":    {"\xff\xfe{\x00}\x00", []string{"f:1:1: error: the file is in UTF-16: save it as UTF-8"}},
		"UTF-16 BE": {"\xfe\xff\x00{\x00}", []string{"f:1:1: error: the file is in UTF-16: save it as UTF-8"}},
		"gateway outside": {strings.Replace(bridgeNet, `/16"}`, `/16", "gateway": "10.94.0.1"}`, 1), []string{
			"f:6:76: plugins[0].ipam.ranges[0][0].gateway: warning: gateway 10.94.0.1 is in no subnet of the pod: ADD fails with code 7"}},
		"gateway by a route":       {strings.Replace(bridgeNet, `/16"}]]`, `/16", "gateway": "10.94.0.1"}]], "routes": [{"dst": "10.94.0.1/32", "scope": 253}, {"dst": "0.0.0.0/0"}]`, 1), nil},
		"gateway in another range": {strings.Replace(bridgeNet, `/16"}`, `/16", "gateway": "10.94.0.1"}], [{"subnet": "10.94.0.0/24"}`, 1), nil},
		"conditions of nftables": {`{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "bridge"}, {"type": "portmap", "capabilities": {"portMappings": true}, ` +
			`"conditionsV4": ["ip daddr 192.0.2.0/24"]}]}`, []string{`f:1:130: plugins[1].conditionsV4: error: conditionsV4 ["ip daddr 192.0.2.0/24"]: ` +
			`this version of portmap does not support conditions of nftables; use the iptables backend with conditions such as ["-d", "192.0.2.0/24"] [2]`}},
		"MAC of tuning": {strings.Replace(bridgeNet, `"cni0",`, `"cni0", "antiSpoof": true,`, 1)[:len(bridgeNet)+len(` "antiSpoof": true,`)-6] +
			`,{"type": "tuning", "mac": "02:00:00:00:00:01"}]}`, []string{"f:6:99: plugins[1].mac: warning: bridge drops all frames of the pod"}},
	} {
		checkLines(t, name, c.data, c.want)
	}
}
