// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// envelope contains the keys of a network configuration that package plugin reads for all plugins.
type envelope struct {
	CNIVersion string          `json:"cniVersion"`
	Name       string          `json:"name"`
	PrevResult json.RawMessage `json:"prevResult"`
}

// readConfig decodes the configuration from stdin and checks the rules for all plugins. envErr, an error in the environment, is returned
// only after the version is known, so that the error document has the correct cniVersion.
func (p Plugin) readConfig(r *Request, data []byte, envErr error) error {
	var env envelope
	decodeErr := Decode(data, &env)
	if decodeErr != nil && r.Verb == "DEL" {
		// DEL needs only the name of the network.
		var lenient struct {
			Name string `json:"name"`
		}
		if Decode(data, &lenient) == nil && lenient.Name != "" {
			env, decodeErr = envelope{Name: lenient.Name}, nil
		}
	}
	if decodeErr == nil && env.CNIVersion == "" {
		env.CNIVersion = "0.1.0"
	}
	if p.supports(env.CNIVersion) {
		r.CNIVersion = env.CNIVersion
	}
	if envErr != nil {
		return envErr
	}
	if len(data) > maxConfig {
		return Errorf(CodeDecode, "network configuration: larger than %d bytes", maxConfig)
	}
	if decodeErr != nil {
		return decodeErr
	}
	r.Config = data
	if err := validID(env.Name); err != nil {
		return Errorf(CodeConfig, "network name %s: %w", quote(env.Name), err)
	}
	r.Network = env.Name
	if r.Verb == "DEL" {
		r.Prev, _, _ = prevResult(env)
		return nil
	}
	if err := p.CheckVersion(r.Verb, env.CNIVersion); err != nil {
		return err
	}
	if r.Verb == "GC" {
		return r.readValid(data)
	}
	return p.readPrev(r, env)
}

func (p Plugin) supports(v string) bool { return slices.Contains(p.versions().SupportedVersions(), v) }

// CheckVersion returns an error with code 1 if the plugin does not support the version of the CNI specification, or if this version has no
// such verb.
func (p Plugin) CheckVersion(verb, v string) error {
	if !p.supports(v) {
		return Errorf(CodeVersion, "cniVersion %s is not supported; supported are %s", quote(v), join(p.versions().SupportedVersions()))
	}
	oldest := map[string]string{"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}[verb]
	if oldest == "" {
		return nil
	}
	if ok, err := version.GreaterThanOrEqualTo(v, oldest); err != nil || !ok {
		return Errorf(CodeVersion, "cniVersion %s has no %s; the oldest that has is %s", v, verb, oldest)
	}
	return nil
}

func (p Plugin) readPrev(r *Request, env envelope) error {
	prev, v, err := prevResult(env)
	if err != nil && r.Verb != "STATUS" {
		return Errorf(CodeDecode, "prevResult: %w", describeDecodeError(err, nil))
	}
	r.Prev = prev
	if v == r.CNIVersion {
		r.prev = env.PrevResult
	}
	if prev == nil && (r.Verb == "CHECK" || r.Verb == "ADD" && p.Chained) {
		err := Errorf(CodeConfig, "%s needs a prevResult", r.Verb)
		if p.Chained {
			err = WithHint(err, "%s is a chained plugin: name it after a main plugin", p.Name)
		}
		return err
	}
	return nil
}

// prevResult returns the result of the previous plugins in the chain and its version, or nil without one.
func prevResult(env envelope) (*types100.Result, string, error) {
	if trimmed := bytes.TrimSpace(env.PrevResult); len(trimmed) == 0 || bytes.Equal(trimmed, []byte("null")) {
		return nil, "", nil
	}
	return ReadResult(env.CNIVersion, env.PrevResult)
}

// ReadResult parses a result of any version, which it also returns. Without one in the result, it is v, that of the configuration.
func ReadResult(v string, raw []byte) (result *types100.Result, own string, err error) {
	defer func() { // the library panics on a null entry
		if p := recover(); p != nil {
			result, err = nil, fmt.Errorf("malformed: %v", p)
		}
	}()
	var named envelope
	if err := json.Unmarshal(raw, &named); err != nil {
		return nil, "", err
	}
	if bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil, "", errors.New("malformed: null")
	}
	own = named.CNIVersion
	if own != "" {
		v = own
	} else if raw, err = withVersion(v, raw); err != nil {
		return nil, "", err
	}
	res, err := version.NewResult(v, raw)
	if err != nil {
		return nil, "", err
	}
	result, err = types100.NewResultFromResult(res)
	if err == nil && (slices.Contains(result.Interfaces, nil) || slices.Contains(result.IPs, nil) || slices.Contains(result.Routes, nil)) {
		return nil, "", errors.New("malformed: an entry of interfaces, ips or routes is null")
	}
	return result, own, err
}

// withVersion adds the cniVersion v to a result without one.
func withVersion(v string, raw []byte) ([]byte, error) {
	keys := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &keys); err != nil {
		return nil, err
	}
	keys["cniVersion"], _ = json.Marshal(v)
	return json.Marshal(keys)
}
