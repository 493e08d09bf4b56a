// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// TestRedacted: values of secret keys are removed at any depth, and a text that is not JSON as a whole.
func TestRedacted(t *testing.T) {
	for text, want := range map[string]string{
		`{"type": "bridge", "apiToken": "s3", "kubernetes": {"kubeconfig": "s3", "clientKey": 1, "node": "a"}}`:                         "bridge node",
		`{"list": [{"password": "s3"}, {"PrivateKey": "s3"}, {"caData": "s3"}], "key": "s3", "keys": 7}`:                                "keys",
		`{"args": ["--token=s3", "node"], "url": "https://me:s3@host/x", "env": "API_PASSWORD=s3 MODE=a"}`:                              "node host/x MODE=a",
		`{"header": "Authorization: Bearer s3", "pem": "-----BEGIN EC PRIVATE KEY-----\\ns3\\n-----END EC PRIVATE KEY-----", "b": "x"}`: "pem x",
		`{"value": "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzMyJ9.s3-s3_s3 b", "--token": "s3"}`:                                                "value",
		"token: s3\n": "left out: 10 bytes that are not JSON",
		"":            "",
	} {
		got := string(redact([]byte(text)))
		if strings.Contains(got, "s3") {
			t.Errorf("%s: a secret is in %s", text, got)
		}
		for _, word := range strings.Fields(want) {
			if !strings.Contains(got, word) {
				t.Errorf("%s: %s lacks %s", text, got, word)
			}
		}
	}
}

// TestOutputRedacted: secrets in the output of programs are left out, and other words of the line stay.
func TestOutputRedacted(t *testing.T) {
	for text, want := range map[string]string{
		"net.ipv6.conf.eth0.stable_secret = fd00::s3":    "net.ipv6.conf.eth0.stable_secret = left out",
		`podlace-node: Authorization: Bearer s3 refused`: `podlace-node: Authorization: Bearer left out refused`,
		`{"clientToken":"s3","node":"a"}`:                `{"clientToken":"left out","node":"a"}`,
		"net.ipv4.conf.all.forwarding = 1":               "net.ipv4.conf.all.forwarding = 1",
		"eth0: mode private, secret-service":             "eth0: mode private, secret-service",
	} {
		if got, err := outputOf("echo", text); err != nil || string(got) != want+"\n" {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
}
