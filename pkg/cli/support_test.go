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

// TestSecretForms: secrets are known by the usual forms of their keys and by their own form, in JSON and in the output of programs.
func TestSecretForms(t *testing.T) {
	aws, github := "AKIA"+strings.Repeat("Q", 16), "ghp_"+strings.Repeat("q", 36)
	for _, key := range []string{"apiKey", "APIKEY", "api_key", "accessKey", "accesskey", "clientCert", "clientCertData", "tlsCA", "psk",
		"wpa-psk", "passphrase", "keyPassphrase", "Authorization", "pwd", "tls.key", "ca"} {
		if got := string(redact([]byte(`{"a": {"` + key + `": "s3"}}`))); strings.Contains(got, "s3") {
			t.Errorf("%s: %s", key, got)
		}
	}
	for _, line := range []string{"apiKey=s3", "api_key: s3", `"accessKey": "s3"`, "--client-key=s3", "psk=s3", "passphrase: s3", "Authorization: Basic s3",
		"authorization: token s3"} {
		if got := hideSecrets("a " + line + " b"); strings.Contains(got, "s3") || !strings.HasSuffix(got, " b") {
			t.Errorf("%s: %s", line, got)
		}
	}
	for _, value := range []string{aws, github, "github_pat_" + strings.Repeat("q", 30), "glpat-" + strings.Repeat("q", 20)} {
		if got := string(redact([]byte(`{"a": "x ` + value + ` y"}`))); strings.Contains(got, value) || !strings.Contains(got, "x left out y") {
			t.Errorf("%s: %s", value, got)
		}
	}
	if got := hideSecrets("unknown key: ranges, pwd"); got != "unknown key: ranges, pwd" {
		t.Error(got)
	}
	for _, harmless := range []string{`"monkey"`, `"replica"`, `"keys"`, `"concert"`} {
		if got := string(redact([]byte(`{` + harmless + `: "v4"}`))); !strings.Contains(got, "v4") {
			t.Errorf("%s: %s", harmless, got)
		}
	}
}
